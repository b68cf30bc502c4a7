//! Random graphs as steps of the target, compared with the interpreter on the host.

#![allow(dead_code, reason = "each test takes a part")]

use std::ops::Range;

use kiln_compiler::{CompileError, Options};
use kiln_cuda::CudaTarget;
use kiln_cuda::testing::host::Differential;
use kiln_graph::testing::{GraphConfig, random_graph, seeds};
use kiln_graph::{Graph, Op, Provenance, Value};

/// Random graphs that the target computes, as one step: a run of the compiler each would be most of the time.
pub struct Batch {
    /// All of them.
    pub graph: Graph,
    /// Of each output.
    pub tolerances: Vec<f64>,
    /// The seed of the graph that each output is from.
    pub seeds: Vec<u64>,
    /// The seeds of graphs with operations that the target refuses, and which.
    pub refused: Vec<(u64, String)>,
}

impl Batch {
    /// The random graphs of `range`, as [`seeds`] moves it.
    pub fn new(range: Range<u64>, config: &GraphConfig, options: &Options) -> Self {
        let mut batch = Self {
            graph: Graph::new("random"),
            tolerances: Vec::new(),
            seeds: Vec::new(),
            refused: Vec::new(),
        };
        for seed in seeds(range) {
            let random = random_graph(seed, config);
            let mut alone = Differential::new(&random.graph);
            alone.options = options.clone();
            match alone.compile() {
                Err(error @ CompileError::Unsupported { .. }) => {
                    batch.refused.push((seed, error.to_string()))
                }
                Err(error) => panic!("seed {seed}: {error}\n{}", random.graph),
                Ok(_) => {
                    append(&mut batch.graph, &random.graph);
                    batch.seeds.extend(random.tolerances.iter().map(|_| seed));
                    batch.tolerances.extend(random.tolerances);
                }
            }
        }
        batch
    }

    /// Compares with the interpreter. No graph may have been refused.
    pub fn check(&self, what: &str, options: &Options) {
        self.check_on(CudaTarget::default(), what, options);
    }

    /// [`Self::check`] for another target.
    pub fn check_on(&self, target: CudaTarget, what: &str, options: &Options) {
        let mut whole = Differential::new(&self.graph).tolerances(&self.tolerances);
        whole.options = options.clone();
        whole.target = target;
        if let Err(error) = whole.check() {
            panic!("{what}: {error}\n(output of seeds {})", self.outputs());
        }
        assert!(self.refused.is_empty(), "{what}: refused are {:?}", self.refused);
    }

    /// Which outputs are of which graph.
    fn outputs(&self) -> String {
        let mut parts: Vec<String> = Vec::new();
        let mut first = 0;
        for part in self.seeds.chunk_by(|a, b| a == b) {
            parts.push(format!("{}: {first}..{}", part[0], first + part.len()));
            first += part.len();
        }
        parts.join(", ")
    }
}

/// Appends `part` to `whole`: parameters and scalars after those that are there, outputs too.
pub fn append(whole: &mut Graph, part: &Graph) {
    let mut map: Vec<Value> = Vec::new();
    for (_, node) in part.nodes() {
        let inputs: Vec<Value> = node.inputs.iter().map(|v| map[v.as_u32() as usize]).collect();
        let outputs = match &node.op {
            Op::Parameter { ty, .. } => vec![whole.parameter(ty.clone())],
            Op::Scalar { dtype, .. } => vec![whole.scalar(*dtype)],
            op => whole
                .add_node(op.clone(), &inputs, Provenance::default())
                .unwrap()
                .to_vec(),
        };
        map.extend(outputs);
    }
    for output in &part.outputs {
        whole.output(map[output.value.as_u32() as usize], None);
    }
}
