//! Text generation: the cache changes nothing but the cost, and draws follow their settings.

use crate::fixture::{Fixture, Inner};
use burn::tensor::{Int, Tensor, TensorData};
use kiln_models::ModelError;
use kiln_models::llama::{GenerateConfig, KvCache, Llama, LlamaConfig, Sampler};
use std::ops::ControlFlow;

fn model(fixture: &Fixture) -> Llama<Inner> {
    let config = LlamaConfig::from_hf_json(&fixture.config).expect("a configuration");
    fixture.weights(config.init::<Inner>(&Default::default()))
}

fn tokens(ids: &[u32]) -> Tensor<Inner, 2, Int> {
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let shape = [1, ids.len()];
    Tensor::from_data(TensorData::new(ids, shape), &Default::default())
}

fn prompt(fixture: &Fixture) -> Vec<u32> {
    fixture
        .data("input.tokens")
        .iter::<i64>()
        .take(12)
        .map(|id| id as u32)
        .collect()
}

#[test]
fn greedy_decoding_equals_the_original() {
    for fixture in Fixture::family("llama")
        .into_iter()
        .filter(|fixture| fixture.holds("output.greedy"))
    {
        let model = model(&fixture);
        let name = &fixture.name;
        let expected: Vec<u32> = fixture
            .data("output.greedy")
            .iter::<i64>()
            .map(|id| id as u32)
            .collect();
        let config = GenerateConfig::new()
            .with_temperature(0.0)
            .with_max_new_tokens(expected.len());
        let mut seen = Vec::new();
        let generated = model
            .generate(&prompt(&fixture), &config, &Default::default(), |token| {
                seen.push(token);
                ControlFlow::Continue(())
            })
            .expect(name);
        assert_eq!(generated, expected, "{name}");
        assert_eq!(seen, expected, "{name}: tokens as they come");
    }
}

#[test]
fn cached_logits_equal_those_of_the_whole_sequence() {
    let fixture = Fixture::load("llama_gqa_tied");
    let model = model(&fixture);
    let ids = prompt(&fixture);
    let whole = model.forward(tokens(&ids));
    // Any way of cutting the sequence into pieces gives the same last logits, also when the cache has to
    // grow.
    for (cuts, reserve) in [
        (vec![12], 12),
        (vec![5, 12], 1),
        (vec![1, 2, 3, 9, 12], 4),
        ((1..=12).collect(), 0),
    ] {
        let mut cache = KvCache::new(2, reserve);
        let mut from = 0;
        for to in cuts {
            let logits = model.forward_cached(tokens(&ids[from..to]), &mut cache);
            let expected = whole
                .clone()
                .slice_dim(1, to - 1..to)
                .reshape([1, model.vocab_size()]);
            fixture.compare(
                &format!("logits after {to} tokens"),
                logits.into_data(),
                expected.into_data(),
            );
            assert_eq!(cache.len(), to);
            from = to;
        }
    }
}

#[test]
fn generation_ends_where_it_should() {
    let fixture = Fixture::load("llama2");
    let model = model(&fixture);
    let device = Default::default();
    let start = prompt(&fixture);
    let greedy = GenerateConfig::new().with_temperature(0.0);
    let go = |_| ControlFlow::Continue(());
    // 32 positions, 12 of them taken.
    let all = model.generate(&start, &greedy, &device, go).expect("generation");
    assert_eq!(all.len(), 20);
    let stop = all[4];
    let first = all
        .iter()
        .position(|token| *token == stop)
        .expect("the token itself");
    let stopped = model.generate(&start, &greedy.clone().with_stop_tokens(vec![stop]), &device, go);
    assert_eq!(stopped.expect("generation"), all[..first]);
    let broken = model.generate(&start, &greedy, &device, |_| ControlFlow::Break(()));
    assert_eq!(broken.expect("generation"), all[..1]);

    let refused = |prompt: &[u32], config: GenerateConfig| {
        matches!(
            model.generate(prompt, &config, &device, go),
            Err(ModelError::Generate { .. })
        )
    };
    assert!(refused(&[], greedy.clone()));
    assert!(refused(&[40], greedy.clone()));
    assert!(refused(&[1; 33], greedy.clone()));
    assert!(refused(&[1], greedy.clone().with_temperature(-1.0)));
    assert!(refused(&[1], greedy.clone().with_top_k(Some(0))));
    assert!(refused(&[1], greedy.with_top_p(Some(0.0))));
}

/// Counts of 20,000 draws from logits with probabilities 1/2, 1/4, 1/8, 1/8.
fn draws(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> [f64; 4] {
    let logits = [0.5f32, 0.125, 0.25, 0.125].map(f32::ln);
    let mut sampler = Sampler::new(temperature, top_k, top_p, 7);
    let mut shares = [0.0; 4];
    for _ in 0..20_000 {
        shares[sampler.sample(&logits).expect("a token") as usize] += 1.0 / 20_000.0;
    }
    shares
}

#[test]
fn draws_follow_the_distribution() {
    let near = |found: [f64; 4], expected: [f64; 4]| {
        for (found, expected) in found.into_iter().zip(expected) {
            // Five standard deviations of a share near 1/2.
            assert!(
                (found - expected).abs() < 0.018,
                "{found} where {expected} was expected"
            );
            assert!(expected > 0.0 || found == 0.0);
        }
    };
    near(draws(1.0, None, None), [0.5, 0.125, 0.25, 0.125]);
    near(draws(1.0, Some(2), None), [2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0]);
    near(draws(1.0, None, Some(0.7)), [2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0]);
    near(draws(1.0, None, Some(0.4)), [1.0, 0.0, 0.0, 0.0]);
    near(draws(0.0, None, None), [1.0, 0.0, 0.0, 0.0]);
    // Temperature 1/2 squares the probabilities.
    near(
        draws(0.5, None, None),
        [0.25, 0.015625, 0.0625, 0.015625].map(|p| p / 0.34375),
    );
    assert_eq!(Sampler::new(1.0, None, None, 0).sample(&[f32::NAN]), None);
}
