"""Forms the sites of a swarm out of unlike providers."""
