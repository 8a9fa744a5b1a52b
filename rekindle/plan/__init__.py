"""From a spec and the catalog to a plan: layout, memory, hours, money, and why not otherwise."""
