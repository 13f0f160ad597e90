//! What files of any family may differ in: how experts are stored, what routers are stored as, how many experts
//! there are and in which layers, and families that can be planned but not run.

mod layouts;
