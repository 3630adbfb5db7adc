"""How parameters are split over ranks."""
