"""Parts of the engine that know no torch: grammars that answers must follow, and drafts from the text itself."""
