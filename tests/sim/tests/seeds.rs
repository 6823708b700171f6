//! A few seeds of the simulator, and the same one twice.

use riser_sim::{Plan, run};

#[test]
fn one_seed_gives_one_run() {
    let outcome = |seed| run(&Plan::of(seed)).unwrap();
    for seed in [1, 3, 10] {
        assert_eq!(outcome(seed), outcome(seed), "seed {seed}");
    }
    assert_ne!(outcome(1), outcome(2));
}

#[test]
fn the_first_seeds_pass() {
    for seed in 1..=30 {
        if let Err(failure) = run(&Plan::of(seed)) {
            panic!("{failure}");
        }
    }
}
