"""Reading a service in the browser and over HTTP: the users' API and its client, view models, and the dashboard."""
