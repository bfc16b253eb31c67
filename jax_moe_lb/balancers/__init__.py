"""Who serves which tokens: one file per balancer."""
