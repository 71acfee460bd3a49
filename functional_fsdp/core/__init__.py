"""The pure core: records and transitions, with no torch and no reading of the world."""
