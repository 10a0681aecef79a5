"""What torch's newer exporter says of the module in its files, and which parameters are had back by it"""
