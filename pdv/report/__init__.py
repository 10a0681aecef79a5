"""What a plan does, said to people: which techniques it is made of, and where its time and memory go."""
