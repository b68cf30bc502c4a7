//! Layers and losses of burn-nn.

use burn::module::{Module, Param};
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::loss::{
    BinaryCrossEntropyLossConfig, CosineEmbeddingLossConfig, CrossEntropyLossConfig, HuberLossConfig,
    KLDivLossConfig, PoissonNllLossConfig, Reduction, SmoothL1LossConfig,
};
use burn::nn::pool::{AdaptiveAvgPool2dConfig, MaxPool2dConfig};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, GaussianNoiseConfig,
    GroupNorm, GroupNormConfig, Gru, GruConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm,
    LstmConfig, LstmState, PRelu, PReluConfig, PaddingConfig2d, RmsNorm, RmsNormConfig, RotaryEncodingConfig,
};
use burn::tensor::activation::{gelu, log_softmax, relu, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::module::{max_pool2d, max_pool2d_with_indices};
use burn::tensor::{Distribution, Tensor};

use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    cross_entropy_with_smoothing => Replayed,
    cross_entropy_with_padding => Replayed,
    cross_entropy_with_weights => Replayed,
    binary_cross_entropy => Replayed,
    cosine_embedding => Replayed,
    huber => Replayed,
    smooth_l1 => Replayed,
    kl_divergence => Replayed,
    poisson => Recorded,
    contrastive_loss => Replayed,
    a_penalty_on_the_weights => Replayed,
    dropout => Replayed,
    gaussian_noise => Replayed,
    dropout_by_hand => Replayed,
    layer_and_rms_norm => Replayed,
    embeddings => Replayed,
    tied_embeddings => Replayed,
    attention_with_masks => Replayed,
    a_transformer_encoder => Replayed,
    rotary_positions => Replayed,
    an_lstm_with_carried_state => Replayed,
    an_lstm_without_state_at_first => Any,
    a_gru => Replayed,
    a_convolutional_network => Replayed,
    windows_that_begin_in_the_padding => Replayed,
    patches_and_the_places_of_largest_elements => Replayed,
    convolutions_of_sequences => Replayed,
    a_transposed_convolution => Replayed,
    weights_drawn_in_the_first_call => Replayed,
    weights_drawn_between_other_numbers => Replayed,
}

/// Trains an `Mlp` on `(x, extra)` by a loss of its output.
macro_rules! loss {
    ($p:expr, |$call:ident| $extra:expr, |$out:ident, $target:ident| $loss:expr) => {{
        let p: &Program = $p;
        let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (x, $target)| {
            let $out = model.forward(x);
            $loss
        });
        for $call in 0..CALLS {
            step.step(LR, (p.x($call), $extra));
        }
    }};
}

fn cross_entropy_with_smoothing(p: &Program) {
    let loss = CrossEntropyLossConfig::new()
        .with_smoothing(Some(0.1))
        .init(&p.device());
    loss!(p, |call| p.labels(call), |out, labels| loss.forward(out, labels));
}

fn cross_entropy_with_padding(p: &Program) {
    let loss = CrossEntropyLossConfig::new()
        .with_pad_tokens(Some(vec![1]))
        .init(&p.device());
    loss!(p, |call| p.labels(call), |out, labels| loss.forward(out, labels));
}

fn cross_entropy_with_weights(p: &Program) {
    let loss = CrossEntropyLossConfig::new()
        .with_weights(Some(vec![0.5, 1.0, 2.0]))
        .init(&p.device());
    loss!(p, |call| p.labels(call), |out, labels| loss.forward(out, labels));
}

fn binary_cross_entropy(p: &Program) {
    let loss = BinaryCrossEntropyLossConfig::new()
        .with_logits(true)
        .init(&p.device());
    loss!(
        p,
        |call| p.indices(call, [EXAMPLES, CLASSES], 2),
        |out, labels| loss.forward(out, labels)
    );
}

fn cosine_embedding(p: &Program) {
    let loss = CosineEmbeddingLossConfig::new().init();
    let signs = |call| p.indices(call, [EXAMPLES], 2) * 2 - 1;
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (a, b, sign): (T2, T2, I1)| {
        loss.forward(model.forward(a), model.forward(b), sign)
    });
    for call in 0..CALLS {
        step.step(LR, (p.x(call), p.x(call + 40), signs(call)));
    }
}

fn huber(p: &Program) {
    let loss = HuberLossConfig::new(0.5).init();
    loss!(p, |call| p.y(call), |out, y| loss.forward(
        out,
        y,
        Reduction::Mean
    ));
}

fn smooth_l1(p: &Program) {
    let loss = SmoothL1LossConfig::new().init();
    loss!(p, |call| p.y(call), |out, y| loss.forward_with_reduction(
        out,
        y,
        Reduction::Mean
    ));
}

fn kl_divergence(p: &Program) {
    let loss = KLDivLossConfig::new().init();
    loss!(p, |call| softmax(p.y(call), 1), |out, y| loss.forward(
        log_softmax(out, 1),
        y,
        Reduction::BatchMean
    ));
}

fn poisson(p: &Program) {
    let loss = PoissonNllLossConfig::new().init();
    loss!(p, |call| p.y(call).abs(), |out, y| loss.forward(
        out,
        y,
        Reduction::Mean
    ));
}

fn contrastive_loss(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (a, b): (T2, T2)| {
        let norm = |x: T2| x.clone() / x.powf_scalar(2.0).sum_dim(1).sqrt();
        let logits = norm(model.forward(a)).matmul(norm(model.forward(b)).transpose()) * 5.0;
        let labels = I1::arange(0..EXAMPLES as i64, &logits.device());
        let loss = cross_entropy(logits.clone(), labels.clone());
        loss + cross_entropy(logits.transpose(), labels)
    });
    for call in 0..CALLS {
        step.step(LR, (p.x(call), p.x(call + 40)));
    }
}

fn a_penalty_on_the_weights(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let penalty = model.first.weight.val().abs().sum() + model.second.weight.val().powf_scalar(2.0).sum();
        (energy(model.forward(x)) + penalty.clone() * 0.01, penalty)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn dropout(p: &Program) {
    let mut step = p.train(p.dropped(), adamw(), |model, (x, labels)| {
        let logits = model.forward(x);
        (cross_entropy(logits.clone(), labels), logits)
    });
    for call in 0..CALLS {
        step.step(LR, p.batch(call));
    }
    p.look(
        "the next draw",
        &T1::random([3], Distribution::Default, &p.device()),
    );
}

fn gaussian_noise(p: &Program) {
    let noise = GaussianNoiseConfig::new(0.1).init();
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        energy(model.forward(noise.forward(x)))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn dropout_by_hand(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let mask = T2::random(x.dims(), Distribution::Bernoulli(0.7), &x.device());
        (energy(model.forward(x * mask.clone())), mask)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

#[derive(Module, Debug)]
struct Norms<B: Backend> {
    first: Linear<B>,
    layer: LayerNorm<B>,
    rms: RmsNorm<B>,
    activation: PRelu<B>,
    scale: Param<Tensor<B, 1>>,
}

impl Norms<B> {
    fn forward(&self, x: T2) -> T2 {
        let h = self.activation.forward(self.layer.forward(self.first.forward(x)));
        self.rms.forward(h) * self.scale.val().unsqueeze()
    }
}

fn layer_and_rms_norm(p: &Program) {
    let device = p.device();
    let model = Norms {
        first: LinearConfig::new(WIDTH, HIDDEN).init(&device),
        layer: LayerNormConfig::new(HIDDEN).init(&device),
        rms: RmsNormConfig::new(HIDDEN).init(&device),
        activation: PReluConfig::new().init(&device),
        scale: Param::from_tensor(Tensor::ones([HIDDEN], &device)),
    };
    let mut step = p.train(drawn(model), adamw(), |model: &Norms<B>, x: T2| {
        energy(model.forward(x) - 0.3)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

#[derive(Module, Debug)]
struct Reader<B: Backend> {
    embedding: Embedding<B>,
    attention: MultiHeadAttention<B>,
    encoder: TransformerEncoder<B>,
    out: Linear<B>,
}

fn reader(p: &Program, dropout: f64) -> Reader<B> {
    let device = p.device();
    drawn(Reader {
        embedding: EmbeddingConfig::new(VOCABULARY, HIDDEN).init(&device),
        attention: MultiHeadAttentionConfig::new(HIDDEN, 2)
            .with_dropout(dropout)
            .init(&device),
        encoder: TransformerEncoderConfig::new(HIDDEN, 12, 2, 1)
            .with_dropout(dropout)
            .init(&device),
        out: LinearConfig::new(HIDDEN, CLASSES).init(&device),
    })
}

/// Tokens: `[2, LENGTH]`.
fn tokens(p: &Program, call: usize) -> I2 {
    p.indices(call, [2, LENGTH], VOCABULARY)
}

fn embeddings(p: &Program) {
    let mut step = p.train(reader(p, 0.0), adamw(), |model: &Reader<B>, tokens: I2| {
        let x = model.embedding.forward(tokens);
        energy(model.out.forward(x.mean_dim(1)))
    });
    for call in 0..CALLS {
        step.step(LR, tokens(p, call));
    }
}

fn tied_embeddings(p: &Program) {
    let mut step = p.train(reader(p, 0.0), sgd(), |model: &Reader<B>, tokens: I2| {
        let x = model
            .embedding
            .forward(tokens.clone())
            .reshape([2 * LENGTH, HIDDEN]);
        let logits = x.matmul(model.embedding.weight.val().transpose());
        cross_entropy(logits, tokens.reshape([2 * LENGTH]))
    });
    for call in 0..CALLS {
        step.step(LR, tokens(p, call));
    }
}

fn attention_with_masks(p: &Program) {
    let mut step = p.train(reader(p, 0.1), sgd(), |model: &Reader<B>, tokens: I2| {
        let padding = tokens.clone().equal_elem(0);
        let order = generate_autoregressive_mask(2, LENGTH, &tokens.device());
        let input = MhaInput::self_attn(model.embedding.forward(tokens))
            .mask_pad(padding)
            .mask_attn(order);
        let output = model.attention.forward(input);
        (energy(model.out.forward(output.context)), output.weights)
    });
    for call in 0..CALLS {
        step.step(LR, tokens(p, call));
    }
}

fn a_transformer_encoder(p: &Program) {
    let mut step = p.train(
        reader(p, 0.1),
        adamw(),
        |model: &Reader<B>, (tokens, labels): (I2, I1)| {
            let x = model
                .encoder
                .forward(TransformerEncoderInput::new(model.embedding.forward(tokens)));
            let logits: T2 = model.out.forward(x).mean_dim(1).squeeze_dim(1);
            (cross_entropy(logits.clone(), labels), logits)
        },
    );
    for call in 0..CALLS {
        step.step(0.1 * LR, (tokens(p, call), p.indices(call, [2], CLASSES)));
    }
}

fn rotary_positions(p: &Program) {
    let rotary = RotaryEncodingConfig::new(2 * LENGTH, HIDDEN).init::<B>(&p.device());
    let mut step = p.train(reader(p, 0.0), sgd(), |model: &Reader<B>, tokens: I2| {
        let x = rotary.forward(model.embedding.forward(tokens));
        energy(model.out.forward(gelu(x)))
    });
    for call in 0..CALLS {
        step.step(LR, tokens(p, call));
    }
}

#[derive(Module, Debug)]
struct Recurrent<B: Backend> {
    lstm: Lstm<B>,
    gru: Gru<B>,
}

fn recurrent(p: &Program) -> Recurrent<B> {
    drawn(Recurrent {
        lstm: LstmConfig::new(WIDTH, HIDDEN, true).init(&p.device()),
        gru: GruConfig::new(WIDTH, HIDDEN, true).init(&p.device()),
    })
}

/// A sequence: `[2, 3, WIDTH]`.
fn sequence(p: &Program, call: usize) -> T3 {
    p.waves(call, [2, 3, WIDTH])
}

fn an_lstm_with_carried_state(p: &Program) {
    let mut step = p.train(
        recurrent(p),
        sgd(),
        |model: &Recurrent<B>, (x, cell, hidden): (T3, T2, T2)| {
            let (out, state) = model.lstm.forward(x, Some(LstmState::new(cell, hidden)));
            (energy(out), (state.cell, state.hidden))
        },
    );
    let zeros = T2::zeros([2, HIDDEN], &p.device());
    let (mut cell, mut hidden) = (zeros.clone(), zeros);
    for call in 0..CALLS {
        (_, (cell, hidden)) = step.step(LR, (sequence(p, call), cell, hidden));
    }
}

fn an_lstm_without_state_at_first(p: &Program) {
    let mut step = p.train(
        recurrent(p),
        adamw(),
        |model: &Recurrent<B>, (x, state): (T3, Option<(T2, T2)>)| {
            let state = state.map(|(cell, hidden)| LstmState::new(cell, hidden));
            let (out, state) = model.lstm.forward(x, state);
            (energy(out), (state.cell, state.hidden))
        },
    );
    let mut state = None;
    for call in 0..12 {
        if call % 6 == 0 {
            state = None;
        }
        let (_, next) = step.step(LR, (sequence(p, call), state));
        state = Some(next);
    }
}

fn a_gru(p: &Program) {
    let mut step = p.train(recurrent(p), sgd(), |model: &Recurrent<B>, x: T3| {
        energy(model.gru.forward(x, None))
    });
    for call in 0..CALLS {
        step.step(LR, sequence(p, call));
    }
}

#[derive(Module, Debug)]
struct Images<B: Backend> {
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    group: GroupNorm<B>,
    up: ConvTranspose2d<B>,
    line: Conv1d<B>,
    out: Linear<B>,
}

fn images(p: &Program) -> Images<B> {
    let device = p.device();
    drawn(Images {
        first: Conv2dConfig::new([2, 4], [3, 3]).init(&device),
        norm: BatchNormConfig::new(4).init(&device),
        group: GroupNormConfig::new(2, 4).init(&device),
        up: ConvTranspose2dConfig::new([4, 2], [2, 2]).init(&device),
        line: Conv1dConfig::new(2, 3, 3).init(&device),
        out: LinearConfig::new(4, CLASSES).init(&device),
    })
}

fn a_convolutional_network(p: &Program) {
    // Group norm takes back most of what the shift before it does: its gradient is a small sum of large
    // terms.
    p.tolerate(1e-4);
    let (pool, mean) = (
        MaxPool2dConfig::new([2, 2]).init(),
        AdaptiveAvgPool2dConfig::new([1, 1]).init(),
    );
    let mut step = p.train(
        images(p),
        momentum(),
        |model: &Images<B>, (x, labels): (T4, I1)| {
            let x = pool.forward(relu(model.norm.forward(model.first.forward(x))));
            let logits = model
                .out
                .forward(mean.forward(model.group.forward(x)).flatten::<2>(1, 3));
            (cross_entropy(logits.clone(), labels), logits)
        },
    );
    for call in 0..CALLS {
        step.step(LR, (p.waves(call, [2, 2, 6, 6]), p.indices(call, [2], CLASSES)));
    }
}

#[derive(Module, Debug)]
struct Patches<B: Backend> {
    cut: Conv2d<B>,
    each: Conv2d<B>,
}

/// A convolution that steps by its own window, one that filters each channel by itself, and a pooling whose
/// indices the program looks at beside its gradient, and one whose it does not.
fn patches_and_the_places_of_largest_elements(p: &Program) {
    let device = p.device();
    let model = drawn(Patches {
        cut: Conv2dConfig::new([3, 8], [2, 3])
            .with_stride([2, 3])
            .init(&device),
        each: Conv2dConfig::new([8, 8], [3, 3])
            .with_groups(8)
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .init(&device),
    });
    let pool = MaxPool2dConfig::new([2, 2]).init();
    let mut step = p.train(model, momentum(), |model: &Patches<B>, x: T4| {
        let x = relu(model.each.forward(model.cut.forward(x)));
        let (largest, places) = max_pool2d_with_indices(x, [2, 2], [1, 1], [0, 0], [1, 1], false);
        (energy(pool.forward(largest)), places.float())
    });
    for call in 0..CALLS {
        step.step(LR, p.waves(call, [2, 3, 8, 15]));
    }
}

/// In ceil mode the last window may have no element of the image: its maximum is -infinity, and its gradient
/// goes nowhere.
fn windows_that_begin_in_the_padding(p: &Program) {
    let mut step = p.train(images(p), momentum(), |model: &Images<B>, x: T4| {
        let x = relu(model.first.forward(x));
        let largest = max_pool2d(x, [2, 2], [2, 2], [1, 1], [1, 1], true);
        energy(largest.clamp(-1.0, 4.0))
    });
    for call in 0..CALLS {
        step.step(LR, p.waves(call, [2, 2, 8, 5]));
    }
}

fn convolutions_of_sequences(p: &Program) {
    let mut step = p.train(images(p), sgd(), |model: &Images<B>, x: T3| {
        energy(model.line.forward(x))
    });
    for call in 0..CALLS {
        step.step(LR, p.waves(call, [2, 2, 6]));
    }
}

fn a_transposed_convolution(p: &Program) {
    let mut step = p.train(images(p), sgd(), |model: &Images<B>, x: T4| {
        let out = model.up.forward(model.first.forward(x.clone()));
        energy(out - x.slice([0..2, 0..2, 0..5, 0..5]))
    });
    for call in 0..CALLS {
        step.step(LR, p.waves(call, [2, 2, 6, 6]));
    }
}

#[derive(Module, Debug)]
struct Backwards<B: Backend> {
    second: Linear<B>,
    first: Linear<B>,
}

fn weights_drawn_in_the_first_call(p: &Program) {
    // Burn draws a weight when it is first used, and these are used in another order than they are declared
    // in.
    let linear = |from, to| LinearConfig::new(from, to).init(&p.device());
    let model = Backwards {
        second: linear(HIDDEN, CLASSES),
        first: linear(WIDTH, HIDDEN),
    };
    let mut step = p.train(model, sgd(), |model: &Backwards<B>, x: T2| {
        energy(model.second.forward(relu(model.first.forward(x))))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

#[derive(Module, Debug)]
struct Scattered<B: Backend> {
    never_used: Linear<B>,
    second: Linear<B>,
    norm: BatchNorm<B>,
    dropout: Dropout,
    first: Linear<B>,
}

fn weights_drawn_between_other_numbers(p: &Program) {
    // The second weight is drawn after the first dropout mask, the one that nobody uses after the backward
    // pass.
    let linear = |from, to| LinearConfig::new(from, to).init(&p.device());
    let model = Scattered {
        never_used: linear(3, 5),
        second: linear(HIDDEN, CLASSES),
        norm: BatchNormConfig::new(HIDDEN).init(&p.device()),
        dropout: DropoutConfig::new(0.3).init(),
        first: linear(WIDTH, HIDDEN),
    };
    let mut step = p.train(model, adamw(), |model: &Scattered<B>, x: T2| {
        let hidden = model.dropout.forward(relu(model.first.forward(x)));
        energy(model.second.forward(model.norm.forward(hidden)))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}
