"""Where elements lie: placements along mesh axes, and layouts of flat storage. No torch."""
