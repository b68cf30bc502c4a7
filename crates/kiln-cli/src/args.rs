//! The command line's grammar.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::{Args, Parser, Subcommand};
use kiln::distributed::Link;
use kiln::{CompileBackend, KilnDevice, UnknownDevice, Weights};

/// Compiled training steps for Burn.
#[derive(Parser, Debug)]
#[command(
    name = "kiln",
    version,
    about,
    after_help = "KILN_LOG shows what Kiln decides, one line an event: recompiles, graph_breaks, fusion, partition, cache, kernels \
                  (several with commas), or a level such as info. KILN_DEBUG=DIR writes each compiled step to a folder: recorded \
                  stream, graph after each pass, schedule, memory plan, sources, and a script that runs the step alone."
)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The 16-bit type that a name stands for.
///
/// # Errors
///
/// In words, if the name is another.
pub fn parse_autocast(name: &str) -> Result<DType, String> {
    match name {
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        other => Err(format!("`{other}` is neither bf16 nor f16")),
    }
}

/// The name that [`parse_autocast`] takes.
pub fn autocast_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        _ => "bf16",
    }
}

/// How parameters are stored, as an argument with a default.
pub type WeightsArgument = Option<Weights>;

/// The name that [`parse_weights`] takes.
pub fn weights_name(weights: WeightsArgument) -> String {
    let Some(weights) = weights else {
        return "f32".to_owned();
    };
    let master = if weights.has_master() { "+master" } else { "" };
    format!("{}{master}", autocast_name(weights.dtype()))
}

/// The name of a device, as it was written: `cuda` is not yet one of several GPUs.
///
/// # Errors
///
/// If it names no device.
pub fn parse_device(name: &str) -> Result<String, UnknownDevice> {
    name.parse::<KilnDevice>().map(|_| name.to_owned())
}

/// How parameters are stored, from its name: none for `f32`.
///
/// # Errors
///
/// In words, if the name is another.
pub fn parse_weights(name: &str) -> Result<WeightsArgument, String> {
    let (dtype, master) = match name.split_once('+') {
        Some((dtype, "master")) => (dtype, true),
        _ => (name, false),
    };
    let weights = match (dtype, master) {
        ("f32", false) => return Ok(None),
        ("bf16", _) => Weights::BF16,
        ("f16", _) => Weights::F16,
        _ => {
            return Err(format!(
                "`{name}` is none of f32, bf16, f16, bf16+master, f16+master"
            ));
        }
    };
    Ok(Some(if master { weights.with_master() } else { weights }))
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Train a model from a config
    Train(TrainArguments),
    /// Evaluate the last checkpoint of a run
    Eval(EvalArguments),
    /// Continue a text with a Llama checkpoint
    Generate(GenerateArguments),
    /// Time one training step
    Bench(BenchArguments),
    /// Show what a training step compiles to
    Explain(ExplainArguments),
    /// Write a run's training step as a folder that trains without Kiln, Rust or a compiler
    Export(ExportArguments),
    /// Shrink a graph on which a backend goes wrong to the smallest that still shows it
    Minify(MinifyArguments),
    /// List what can run a compiled step
    Backends,
    /// Look into the disk cache of compiled steps
    Cache {
        /// What to do with it.
        #[command(subcommand)]
        action: CacheAction,
    },
}

/// Arguments of `kiln minify`.
#[derive(Args, Debug, Clone)]
pub struct MinifyArguments {
    /// A graph (.kg), or the folder of a step in a debug dump (KILN_DEBUG)
    pub dump: PathBuf,
    /// What is looked at: aot_eager, candle, cpu or cuda
    #[arg(long, default_value_t = CompileBackend::Cpu)]
    pub backend: CompileBackend,
    /// Where it runs: cpu, cuda or cuda:ORDINAL
    #[arg(long, default_value_t = KilnDevice::cpu())]
    pub device: KilnDevice,
    /// By how much results may differ from the interpreter's, relative to the largest of an output
    #[arg(long, default_value_t = 1e-4)]
    pub tolerance: f64,
    /// Where the smallest graph goes; by default beside the dump, as NAME.min.kg
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Seconds to look for a smaller graph
    #[arg(long, default_value_t = 600)]
    pub seconds: u64,
    /// Seconds after which a graph that still runs is taken to hang
    #[arg(long, default_value_t = 120)]
    pub timeout: u64,
    /// Look at this graph only, and say what is wrong; the exit status is 1 if anything is
    #[arg(long)]
    pub check: bool,
    /// Answer the process that asks
    #[arg(long, hide = true, requires = "check")]
    pub verdict: bool,
}

/// What to do with the cache.
#[derive(Subcommand, Debug, Clone, Copy)]
pub enum CacheAction {
    /// Print what it holds for each target, last used first
    List,
    /// Remove all of it
    Clear,
}

/// Arguments of `kiln train`.
#[derive(Args, Debug, Clone)]
pub struct TrainArguments {
    /// Config file; a resumed run has its own
    #[arg(long, required_unless_present = "resume")]
    pub config: Option<PathBuf>,
    /// Number of optimizer steps, instead of the config's
    #[arg(long)]
    pub steps: Option<u64>,
    /// What runs the step: eager, aot_eager, candle, interpret, cpu or cuda
    #[arg(long)]
    pub backend: Option<CompileBackend>,
    /// Where it runs, instead of the config's `train.device`: cpu, cuda or cuda:ORDINAL; of several ranks
    /// with cuda each takes a GPU of its own
    #[arg(long, value_parser = parse_device)]
    pub device: Option<String>,
    /// Mixed precision, instead of the config's `train.autocast`: let products, convolutions and attention
    /// read bf16 or f16
    #[arg(long, value_name = "TYPE", value_parser = parse_autocast)]
    pub autocast: Option<DType>,
    /// How parameters are stored, instead of the config's `train.weights`: f32, bf16, f16, bf16+master or
    /// f16+master
    #[arg(long, value_name = "TYPE")]
    pub weights: Option<String>,
    /// Folder of a new run; by default runs/NAME. A resumed run stays in its own
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Go on with the run in this folder, or from one of its checkpoints; later ones are set aside, with the
    /// log of their steps
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Change a key of the config, as in train.batch_size=16; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Profile the first STEPS steps: writes trace.json for Perfetto into the run's folder and prints where
    /// the time went
    #[arg(long, value_name = "STEPS")]
    pub profile: Option<u64>,
}

/// Arguments of `kiln eval`.
#[derive(Args, Debug, Clone)]
pub struct EvalArguments {
    /// Folder of the run, or one of its checkpoints
    #[arg(long, value_name = "DIR")]
    pub run: PathBuf,
    /// What runs the forward pass
    #[arg(long)]
    pub backend: Option<CompileBackend>,
    /// Where it runs, instead of the config's `train.device`: cpu, cuda or cuda:ORDINAL
    #[arg(long)]
    pub device: Option<KilnDevice>,
}

/// Arguments of `kiln export`.
#[derive(Args, Debug, Clone)]
pub struct ExportArguments {
    /// Folder of the run, or one of its checkpoints
    #[arg(long, value_name = "DIR")]
    pub run: PathBuf,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Arguments of `kiln generate`.
#[derive(Args, Debug, Clone)]
pub struct GenerateArguments {
    /// Folder or file of a Llama checkpoint, the folder of a run, or a repository of the Hugging Face hub
    #[arg(long, value_name = "PATH")]
    pub model: String,
    /// The text to continue
    #[arg(long)]
    pub prompt: String,
    /// Where it runs: cpu, cuda or cuda:ORDINAL
    #[arg(long, default_value_t = KilnDevice::cpu())]
    pub device: KilnDevice,
    /// Most tokens to add
    #[arg(long, default_value_t = 128)]
    pub tokens: usize,
    /// Below 1 sharper, above 1 flatter, 0 always the likeliest token
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Draw from the k likeliest tokens only
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Draw from the fewest tokens that have this probability together
    #[arg(long)]
    pub top_p: Option<f64>,
    /// Seed of the draws
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Arguments of `kiln bench`.
#[derive(Args, Debug, Clone)]
pub struct BenchArguments {
    /// mlp, llama-tiny, llama-15m, llama-125m, llama-1b, decoder-2l, bert-minilm, bert-base, vit_small, or an
    /// image classifier such as resnet18
    #[arg(required_unless_present = "table")]
    pub model: Option<String>,
    /// Examples in a batch; each row of the table has sizes of its own
    #[arg(long, default_value_t = 8, conflicts_with = "table")]
    pub batch: usize,
    /// Tokens in an example of a language model; not for the table
    #[arg(long, default_value_t = 128, conflicts_with = "table")]
    pub seq: usize,
    /// Pixels a side of an image; not for the table
    #[arg(long, default_value_t = 224, conflicts_with = "table")]
    pub size: usize,
    /// Timed steps
    #[arg(long, default_value_t = 10)]
    pub steps: usize,
    /// What runs the step: eager, aot_eager, candle, interpret, cpu or cuda
    #[arg(long, default_value_t = CompileBackend::Cpu)]
    pub backend: CompileBackend,
    /// Where it runs: cpu, cuda or cuda:ORDINAL; steps on a GPU run on backend cuda
    #[arg(long, default_value_t = KilnDevice::cpu())]
    pub device: KilnDevice,
    /// Most bytes of intermediate values, such as 200000000
    #[arg(long, value_name = "BYTES")]
    pub memory_budget: Option<usize>,
    /// Let products of f32 on a GPU round their operands to 10 bits of fraction, those of the table's other
    /// programs too
    #[arg(long)]
    pub tf32: bool,
    /// Mixed precision: let products, convolutions and attention read bf16 or f16
    #[arg(long, value_name = "TYPE", value_parser = parse_autocast)]
    pub autocast: Option<DType>,
    /// Store parameters as bf16, f16, bf16+master or f16+master; with a master the update is that of f32. Not
    /// for a forward pass alone
    #[arg(
        long,
        value_name = "TYPE",
        default_value = "f32",
        value_parser = parse_weights,
        conflicts_with = "infer"
    )]
    pub weights: WeightsArgument,
    /// Let the ranks divide the optimizer's state among them, as `distributed.sharded_state` of a config
    /// does; not for the table, nor for a forward pass alone
    #[arg(long, conflicts_with_all = ["table", "infer"])]
    pub sharded: bool,
    /// Time the forward pass alone
    #[arg(long)]
    pub infer: bool,
    /// Print one JSON line instead of sentences
    #[arg(long)]
    pub json: bool,
    /// Time several models beside PyTorch and JAX, where python3 (or PEER_PYTHON) has them, and print a table
    #[arg(long)]
    pub table: bool,
    /// How often each program of the table is measured; the median counts
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Programs of the table beside Kiln, with commas between them: torch-eager, torch-compile,
    /// torch-overhead (CUDA graphs), jax-jit; all that are installed by default
    #[arg(long, value_delimiter = ',', requires = "table")]
    pub peers: Vec<String>,
}

/// Arguments of `kiln explain`.
#[derive(Args, Debug, Clone)]
#[group(required = true, multiple = false)]
pub struct ExplainSubject {
    /// The step of a config
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// The step of a model that `kiln bench` knows
    #[arg(long)]
    pub model: Option<String>,
}

/// Arguments of `kiln explain`.
#[derive(Args, Debug, Clone)]
pub struct ExplainArguments {
    /// What to explain.
    #[command(flatten)]
    pub subject: ExplainSubject,
    /// What runs the step: eager, aot_eager, candle, interpret, cpu or cuda; by default what the config says,
    /// or cpu
    #[arg(long)]
    pub backend: Option<CompileBackend>,
    /// Where it runs: cpu, cuda or cuda:ORDINAL; steps on a GPU run on backend cuda. By default what the
    /// config says, or cpu
    #[arg(long)]
    pub device: Option<KilnDevice>,
    /// Examples in a batch, for --model
    #[arg(long, default_value_t = 2)]
    pub batch: usize,
    /// Tokens in an example, for --model
    #[arg(long, default_value_t = 64)]
    pub seq: usize,
    /// Pixels a side of an image, for --model
    #[arg(long, default_value_t = 64)]
    pub size: usize,
    /// Print the recorded graph too
    #[arg(long)]
    pub graph: bool,
    /// Print JSON instead of sentences; the graph and the memory curve are no part of it
    #[arg(long, conflicts_with_all = ["graph", "memory_curve"])]
    pub json: bool,
    /// Write a page for the browser: memory over the step, the graph with its kernels, tables
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Time each kernel, and compare it with what this machine can do
    #[arg(long)]
    pub measure: bool,
    /// Most bytes of intermediate values, such as 200000000, in place of the config's bound
    #[arg(long, value_name = "BYTES")]
    pub memory_budget: Option<usize>,
    /// Let products of f32 on a GPU round their operands to 10 bits of fraction, as `train.tf32` of a config
    /// does
    #[arg(long)]
    pub tf32: bool,
    /// Mixed precision: let products, convolutions and attention read bf16 or f16, in place of the config's
    /// type
    #[arg(long, value_name = "TYPE", value_parser = parse_autocast)]
    pub autocast: Option<DType>,
    /// Store parameters as f32, bf16, f16, bf16+master or f16+master; with a master the update is that of
    /// f32. By default what the config says, or f32
    #[arg(long, value_name = "TYPE", value_parser = parse_weights)]
    pub weights: Option<WeightsArgument>,
    /// Predict the step on so many ranks; several with commas, which have as much work each as the first.
    /// Under mpirun or srun the ranks that were started are measured and predicted
    #[arg(long, value_name = "N", value_delimiter = ',', requires = "link")]
    pub ranks: Vec<usize>,
    /// What connects them: bytes a second of a rank and seconds of an exchange, such as 12.5GB,5us; a third
    /// number is the time of a message (1us)
    #[arg(long, value_name = "BANDWIDTH,LATENCY", requires = "ranks")]
    pub link: Option<Link>,
    /// Let the ranks divide the optimizer's state among them, as `distributed.sharded_state` of a config does
    #[arg(long)]
    pub sharded: bool,
    /// Most megabytes of gradients that travel together; by default as `kiln train` would choose it for the
    /// link
    #[arg(long, value_name = "MB")]
    pub bucket_mb: Option<f64>,
    /// Threads of the step; by default one for each core, which ranks of one machine divide
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
    /// Time the step under several memory budgets, print the trade and draw it
    #[arg(long, value_name = "FILE.svg")]
    pub memory_curve: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_without_a_number_stays_one() {
        let device = |name: &str| {
            let words = ["kiln", "train", "--config", "run.toml", "--device", name];
            Arguments::try_parse_from(words).map(|arguments| match arguments.command {
                Command::Train(arguments) => arguments.device,
                other => panic!("{other:?}"),
            })
        };
        // Ranks tell by it that each takes a GPU of its own.
        assert_eq!(device("cuda").unwrap().as_deref(), Some("cuda"));
        assert_eq!(device("cuda:1").unwrap().as_deref(), Some("cuda:1"));
        assert!(device("cuda:one").unwrap_err().to_string().contains("cuda:one"));
    }

    /// An option that would be passed over is an error.
    #[test]
    fn options_that_do_not_go_together_are_refused() {
        let refused = |words: &str| {
            let words = words.split(' ');
            Arguments::try_parse_from(words)
                .err()
                .map(|error| error.to_string())
        };
        let table =
            "kiln bench --table --rounds 1 --steps 2 --peers torch-eager --device cuda --autocast bf16";
        assert_eq!(refused(table), None);
        assert_eq!(
            refused("kiln bench --table --tf32 --weights bf16 --memory-budget 1"),
            None
        );
        assert_eq!(refused("kiln bench mlp --batch 8 --weights bf16 --sharded"), None);
        assert_eq!(refused("kiln bench mlp --batch 8 --infer"), None);
        assert_eq!(refused("kiln explain --model mlp --json --html page.html"), None);
        for (words, option, other) in [
            ("kiln bench --table --batch 8", "--batch", "--table"),
            ("kiln bench --table --seq 8", "--seq", "--table"),
            ("kiln bench --table --size 8", "--size", "--table"),
            ("kiln bench --table --sharded", "--sharded", "--table"),
            ("kiln bench mlp --infer --sharded", "--infer", "--sharded"),
            ("kiln bench mlp --infer --weights bf16", "--infer", "--weights"),
            ("kiln explain --model mlp --json --graph", "--json", "--graph"),
            (
                "kiln explain --model mlp --json --memory-curve f.svg",
                "--json",
                "--memory-curve",
            ),
        ] {
            let error = refused(words).unwrap_or_default();
            assert!(
                error.contains(option) && error.contains(other),
                "{words}: {error}"
            );
            assert!(error.contains("cannot be used with"), "{words}: {error}");
        }
    }

    #[test]
    fn names_of_weights_are_read_back() {
        for name in ["f32", "bf16", "f16", "bf16+master", "f16+master"] {
            assert_eq!(weights_name(parse_weights(name).unwrap()), name);
        }
    }
}
