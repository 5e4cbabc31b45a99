//! Recording: from verdicts to durable state.
