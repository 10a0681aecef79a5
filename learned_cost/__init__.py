"""What a program costs on real hardware: device records, profiles, and the models learned from them."""
