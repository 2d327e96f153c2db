"""Two tasks fine-tuned at once by two clients, on layers that they share."""
