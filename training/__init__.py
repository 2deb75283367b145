"""How the shipped tiny model is made: synthetic dialogues, tokenizer, training, evaluation. See README.md."""
