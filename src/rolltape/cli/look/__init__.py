"""Commands that show a run: view, ls, compare, show, tree, trace, query, push."""
