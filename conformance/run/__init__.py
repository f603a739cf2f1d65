"""Sessions: cases run on ranks, are judged and recorded."""
