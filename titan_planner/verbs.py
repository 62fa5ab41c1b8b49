"""The verbs that the planner adds to `python -m torchtitan`."""

VERBS = {
    "before there are machines": {
        "plan": "titan_planner.plan_verb",
        "plan measured": "titan_planner.plan.measured",
        "plan rows": "titan_planner.published.verb",
        "plan place": "titan_planner.places.verb",
        "probe": "titan_planner.probe.verb",
        "netem": "titan_planner.netem.verb",
        "swarm plan": "titan_planner.sites.verb",
    },
}
