//! Planning 40 layers of 256 experts: 30,720 matrices.

use std::time::Instant;

use orkpack::plan::{PlanRequest, Routing, choose};
use orkpack::profile::DeviceProfile;
use orkpack::tensor::Dtype;

use crate::median;
use crate::support::routed::{shape, statistics};

const LIMIT_MS: f64 = 100.0;
const RUNS: usize = 9;

pub fn bench() {
    let profile = DeviceProfile::built_in(DeviceProfile::DEFAULT).expect("a profile");
    let shape = shape(40, 256, 8, 2048, 512, Dtype::Q4_K);
    let statistics = statistics(&shape, 1024, 2.2, 7);
    let request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    let times = (0..RUNS).map(|_| {
        let began = Instant::now();
        std::hint::black_box(choose(&request).expect("a plan"));
        began.elapsed().as_secs_f64() * 1e3
    });
    let ms = median(times.collect());
    println!(
        "plan: 30,720 matrices in {ms:.1} ms (measured here), {:.2} of the {LIMIT_MS} ms allowed",
        ms / LIMIT_MS
    );
}
