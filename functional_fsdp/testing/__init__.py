"""What users need to test transitions and interpreters with no GPU and no torch."""
