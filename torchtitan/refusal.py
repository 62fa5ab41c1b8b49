"""How this recipe says no: an error whose message is all that its reader needs."""


class Refusal(ValueError):
    """A program ends with this message, which gives the value, the rule and the fix, and shows no stack trace."""
