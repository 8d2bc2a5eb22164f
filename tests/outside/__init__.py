"""A model that diffusers does not have, as a user would bring it along: nothing here is part of the package."""
