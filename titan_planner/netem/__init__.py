"""A network between distant sites, emulated in namespaces of one machine."""
