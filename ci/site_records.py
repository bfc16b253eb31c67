"""Extension of griffe, which reads the sources for the API reference."""

import griffe


class Records(griffe.Extension):
    """Add constructors to classes under `@pytree`, which griffe does not recognize as dataclasses."""

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        """Add the generated `__init__` to a class."""
        decorators = {str(decorator.value) for decorator in cls.decorators}
        if "__init__" in cls.members or "pytree" not in decorators:
            return
        kind = griffe.ParameterKind.positional_or_keyword
        fields = [member for member in cls.members.values() if member.is_attribute and member.annotation is not None]
        parameters = [griffe.Parameter("self", kind=kind)] + [
            griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value)
            for field in fields
        ]
        init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), returns="None", parent=cls)
        cls.set_member("__init__", init)
