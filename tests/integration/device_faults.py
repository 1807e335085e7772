"""What a transport to another machine must survive. A test module subclasses `RemoteFaults` and gives the fixtures."""
