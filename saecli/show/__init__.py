"""Tables, pictures, HTML pages, made of the documents that measure returns."""
