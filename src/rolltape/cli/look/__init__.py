"""Commands that show a run: view, ls, show, tree, trace, query, push."""
