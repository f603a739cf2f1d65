"""Our scaler in other people's trainers; each module imports its trainer."""
