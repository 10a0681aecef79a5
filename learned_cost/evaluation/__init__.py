"""How good predictions are on measurements that were not trained on."""
