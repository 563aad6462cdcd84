//! Keys of which few are busy and many are not.

/// The k-th of n keys (from 1) has weight 1/k^s.
pub(super) struct Zipf {
    /// The share of the first key, of the first two, ….
    shares: Vec<f64>,
}

impl Zipf {
    pub(super) fn new(keys: u32, s: f64) -> Self {
        let mut sum = 0.0;
        let mut shares: Vec<f64> = (1..=keys)
            .map(|k| {
                sum += f64::from(k).powf(-s);
                sum
            })
            .collect();
        shares.iter_mut().for_each(|share| *share /= sum);
        Self { shares }
    }

    /// The key at a place between 0 and 1.
    pub(super) fn at(&self, place: f64) -> u32 {
        let index = self.shares.partition_point(|share| *share <= place);
        index.min(self.shares.len().saturating_sub(1)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::Zipf;

    #[test]
    fn the_top_key_has_the_share_that_the_formula_says() {
        // 1 / (1 + 1/2 + … + 1/10,000)
        let zipf = Zipf::new(10_000, 1.0);
        assert!((zipf.shares[0] - 0.1022).abs() < 0.0001);
        assert_eq!((zipf.at(0.0), zipf.at(0.11), zipf.at(1.0)), (0, 1, 9_999));
    }
}
