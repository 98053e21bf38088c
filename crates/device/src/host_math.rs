//! Exact host tables in float64: sine, cosine, powers and exponentials of our own.
