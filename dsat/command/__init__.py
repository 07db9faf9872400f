"""The user's command or experiment: its configuration, arguments and launcher."""
