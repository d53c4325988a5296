"""Tables and figures of the papers, in their own layout: our figures beside the published ones."""
