"""One worked example per reported fault, literal slots, written from the fault list before the code was read."""
