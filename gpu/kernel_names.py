def name_from_host_symbol(symbol: str) -> str | None:
    return symbol
