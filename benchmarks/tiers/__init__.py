"""A burst of four times what the arena holds: what does putting take, and what is refused, with tiers and without?"""
