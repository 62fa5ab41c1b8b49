"""One job, described to Slurm, Run:ai, Kubernetes and SkyPilot. No torch."""
