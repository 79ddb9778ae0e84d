# SPDX-License-Identifier: Apache-2.0
"""Runs in each Python kernel when it starts: what results are shown as, beside what IPython does.

Tables become ``e2b/data``, figures ``e2b/chart``, lists and dictionaries ``application/json``.
Pictures are shown when they are saved, since there is no screen to show them on.
"""


def _install() -> None:
    import math
    import sys

    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter, JSONFormatter
    from traitlets import ObjectName, Unicode

    def plain(value):
        """As JSON can hold it."""
        if value is None or value != value:
            # Not a number, not a time.
            return None
        if hasattr(value, "isoformat"):
            return value.isoformat()
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)

    class Data(BaseFormatter):
        format_type = Unicode("e2b/data")
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = (dict, str)

        def __call__(self, shown):
            pandas = sys.modules.get("pandas")
            if pandas is None or not isinstance(shown, pandas.DataFrame):
                return super().__call__(shown)
            return {
                str(name): [plain(value) for value in column]
                for name, column in shown.to_dict(orient="list").items()
            }

    class Chart(BaseFormatter):
        format_type = Unicode("e2b/chart")
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = (dict, str)

        def __call__(self, shown):
            figures = sys.modules.get("matplotlib.figure")
            if figures is None or not isinstance(shown, figures.Figure):
                return super().__call__(shown)
            from e2b_charts import chart_figure_to_dict

            try:
                return chart_figure_to_dict(shown)
            except Exception:
                # A kind of figure that it does not know: the picture is there all the same.
                return {}

    class Json(JSONFormatter):
        def __call__(self, shown):
            if isinstance(shown, (list, dict)):
                import orjson

                options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
                try:
                    return orjson.loads(orjson.dumps(shown, option=options)), {"expanded": True}
                except TypeError:
                    return None
            return super().__call__(shown)

    display = get_ipython().display_formatter
    for kind, formatter in (("e2b/data", Data), ("e2b/chart", Chart), ("application/json", Json)):
        display.formatters[kind] = formatter(parent=display)


def _show_pictures() -> None:
    from IPython.display import display

    try:
        from PIL import Image, ImageShow
    except ImportError:
        return

    save = Image.Image.save

    def save_and_show(picture, target, *arguments, **options):
        if isinstance(target, str):
            display(picture)
        return save(picture, target, *arguments, **options)

    Image.Image.save = save_and_show
    ImageShow.UnixViewer.show_file = lambda viewer, path, **options: 0


_install()
_show_pictures()
del _install, _show_pictures
