"""HTML for samples, trees, rollouts and runs in a notebook; their `_repr_html_` calls it."""

from rolltape.notebook.rollout import linearized_html, rollout_html, run_html, session_html, tree_html
from rolltape.notebook.sample import sample_html

__all__ = ["linearized_html", "rollout_html", "run_html", "sample_html", "session_html", "tree_html"]
