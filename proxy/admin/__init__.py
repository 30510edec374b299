"""The admin listener: sessions are opened and closed here, metrics are read here."""
