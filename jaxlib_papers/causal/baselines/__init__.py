"""Classical causal discovery for comparison: NOTEARS, DirectLiNGAM, PC with Fisher's z, GES."""
