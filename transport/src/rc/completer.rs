//! The completer: takes responses and completes send requests.
