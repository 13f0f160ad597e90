//! The obvious executor: weights dequantised to f32, sums in f64, nothing shared with the real kernels.

use std::collections::HashMap;

use orkpack::blocks;
use orkpack::executor::{
    Activation, Executor, ExecutorError, ExpertBiases, Product, Routing, Weight, WeightId, WeightTable,
};
use orkpack::model::{Model, State, Wanted, forward};
use orkpack::pack::Pack;
use orkpack::tensor::{MatrixId, MatrixView, Place, Projection, TensorSource};
use orkpack::units::LayerId;

/// Computes from `source`; keeps what it has dequantised, so only for small models.
pub struct NaiveExecutor<'a> {
    source: &'a dyn TensorSource,
    weights: &'a WeightTable,
    dequantised: HashMap<Place, Vec<f32>>,
    /// Of expert matrices the outputs, from the first, that are multiplied by the int8 contract, in floats.
    pub hot: HashMap<MatrixId, usize>,
}

impl<'a> NaiveExecutor<'a> {
    pub fn new(source: &'a dyn TensorSource, weights: &'a WeightTable) -> Self {
        NaiveExecutor { source, weights, dequantised: HashMap::new(), hot: HashMap::new() }
    }

    /// `[n_out, n_in]`.
    fn matrix(&mut self, weight: &Weight) -> &[f32] {
        let source = self.source;
        self.dequantised.entry(weight.place).or_insert_with(|| {
            let mut matrix = vec![0.0; weight.n_in * weight.n_out];
            blocks::dequantize(weight.dtype, source.bytes(weight.place).unwrap(), &mut matrix).unwrap();
            matrix
        })
    }

    /// One matrix of an expert times one row.
    fn expert(&mut self, id: MatrixId, x: &[f32]) -> Vec<f32> {
        let weight = *self.weights.bank(id.layer).unwrap().weight(id.expert, id.projection).unwrap();
        let n_hot = self.hot.get(&id).copied().unwrap_or(0);
        let mut out = self.product(&weight, x);
        let (x, x_scale) = round(x);
        let rows = self.matrix(&weight).chunks_exact(weight.n_in);
        for (out, row) in out.iter_mut().zip(rows).take(n_hot) {
            let (row, scale) = round(row);
            let sum: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            *out = sum as f32 * (x_scale * scale);
        }
        out
    }

    fn product(&mut self, weight: &Weight, x: &[f32]) -> Vec<f32> {
        assert_eq!(x.len(), weight.n_in);
        let dot =
            |row: &[f32]| -> f64 { row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum() };
        self.matrix(weight).chunks_exact(weight.n_in).map(|row| dot(row) as f32).collect()
    }
}

/// Logits after every token, fed one at a time.
pub fn stepwise(model: &Model, executor: &mut dyn Executor, tokens: &[u32]) -> Vec<f32> {
    let (mut state, mut all, mut out) = (State::new(model, tokens.len()), Vec::new(), Vec::new());
    for token in tokens {
        forward(model, executor, &mut state, &[*token], Wanted::Last, &mut out).unwrap();
        all.extend_from_slice(&out);
    }
    all
}

/// The matrices that decode keeps hot, and how many outputs of each: gate and up only together.
pub fn hot_matrices(pack: &Pack) -> Vec<(MatrixId, usize)> {
    let cut = pack.cut(1).unwrap();
    let layers = (0..cut.experts.len()).map(|layer| LayerId(layer as u32));
    let hot = layers
        .flat_map(|layer| pack.hot(cut, layer))
        .filter_map(|placed| Some((placed.matrix.expert()?, placed.n_out as usize)));
    let hot: HashMap<MatrixId, usize> = hot.collect();
    let is_whole = |(id, _): &(&MatrixId, &usize)| {
        let twin = match id.projection {
            Projection::Gate => Projection::Up,
            Projection::Up => Projection::Gate,
            Projection::Down => return true,
        };
        hot.contains_key(&MatrixId { projection: twin, ..**id })
    };
    hot.iter().filter(is_whole).map(|(id, n_out)| (*id, *n_out)).collect()
}

/// The integers nearest to a row whose largest is 127, as floats, and what one of them stands for.
fn round(row: &[f32]) -> (Vec<f32>, f32) {
    let max = row.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    if max == 0.0 {
        return (vec![0.0; row.len()], 0.0);
    }
    (row.iter().map(|x| (x * (127.0 / max)).round_ties_even()).collect(), max / 127.0)
}

/// What becomes of one output of gate and one of up, written out once more.
fn activate(activation: Activation, gate: f32, up: f32) -> f32 {
    match activation {
        Activation::SwiGlu => gate / (1.0 + (-gate).exp()) * up,
        Activation::ClampedSwiGlu { slope, limit } => {
            let gate = if gate > limit { limit } else { gate };
            let up = up.max(-limit).min(limit);
            gate / (1.0 + (-(slope * gate)).exp()) * (1.0 + up)
        }
    }
}

impl Executor for NaiveExecutor<'_> {
    fn linear(
        &mut self,
        rows: MatrixView<'_, f32>,
        products: &mut [Product<'_>],
    ) -> Result<(), ExecutorError> {
        for product in products {
            let weight = *self.weights.linear(product.weight).unwrap();
            assert_eq!(product.out.len(), rows.n_rows() * weight.n_out);
            for (i, out) in product.out.chunks_exact_mut(weight.n_out).enumerate() {
                out.copy_from_slice(&self.product(&weight, rows.row(i)));
            }
        }
        Ok(())
    }

    fn experts(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        routing: &Routing,
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        assert_eq!((routing.n_rows(), out.len()), (rows.n_rows(), rows.data().len()));
        let bank = self.weights.bank(layer).unwrap();
        out.fill(0.0);
        for (row, out) in out.chunks_exact_mut(rows.n_cols()).enumerate() {
            for slot in row * routing.n_used..(row + 1) * routing.n_used {
                let [gate, up, down] = Projection::ALL.map(|projection| MatrixId {
                    layer,
                    expert: routing.experts[slot],
                    projection,
                });
                let expert = routing.experts[slot].index();
                let bias = |list: fn(&ExpertBiases) -> &Vec<f32>, n: usize| match &bank.biases {
                    Some(biases) => list(biases)[expert * n..(expert + 1) * n].to_vec(),
                    None => vec![0.0; n],
                };
                let sum = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
                let (n_ff, n_embd) = (bank.gate[0].n_out, bank.down[0].n_out);
                let gate = sum(self.expert(gate, rows.row(row)), bias(|b| &b.gate, n_ff));
                let up = sum(self.expert(up, rows.row(row)), bias(|b| &b.up, n_ff));
                let inner: Vec<f32> =
                    gate.iter().zip(&up).map(|(&gate, &up)| activate(bank.activation, gate, up)).collect();
                let down = sum(self.expert(down, &inner), bias(|b| &b.down, n_embd));
                out.iter_mut().zip(down).for_each(|(out, down)| *out += routing.weights[slot] * down);
            }
        }
        Ok(())
    }

    fn gather(&mut self, weight: WeightId, ids: &[u32], out: &mut [f32]) -> Result<(), ExecutorError> {
        let weight = *self.weights.linear(weight).unwrap();
        let matrix = self.matrix(&weight);
        for (id, out) in ids.iter().zip(out.chunks_exact_mut(weight.n_in)) {
            out.copy_from_slice(&matrix[*id as usize * weight.n_in..][..weight.n_in]);
        }
        Ok(())
    }
}
