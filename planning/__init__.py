"""What a run takes of a rank's memory under each strategy, told before anything is launched, and which one to take."""
