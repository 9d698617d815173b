"""How calls are done: by the engine, in place, in the background, by strategies of the user."""
