"""Real processes on real, slow links: network namespaces of one machine. See docs/networks.md."""
