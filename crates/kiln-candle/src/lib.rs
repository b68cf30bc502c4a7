//! A graph executor on candle-core, independent of Burn's kernels: the oracle of differential tests.
