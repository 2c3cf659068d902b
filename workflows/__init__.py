"""What people touch: workflows, environments and reward functions. Imports areal_like.api only."""
