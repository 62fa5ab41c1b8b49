"""The verbs that the fleet adds to `python -m torchtitan`."""

VERBS = {
    "several machines": {
        "launch": "titan_fleet.submit.verb",
        "node": "titan_fleet.node.verb",
        "console": "titan_fleet.console.verb",
        "console token": "titan_fleet.console.token",
        "reach serve": "titan_fleet.reach.serve",
        "reach join": "titan_fleet.reach.join",
        "reach leave": "titan_fleet.reach.leave",
        "drill": "titan_fleet.drill.verb",
    },
    "several sites": {
        "swarm try": "titan_fleet.swarm.attempt",
        "swarm keys": "titan_fleet.swarm.keys",
        "swarm serve": "titan_fleet.swarm.syncer.serve",
        "swarm status": "titan_fleet.swarm.status",
        "swarm export": "titan_fleet.swarm.syncer.export",
    },
}
