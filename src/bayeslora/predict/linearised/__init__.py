"""The linearised model of a Laplace approximation: curvature of the likelihood, and predictions by Jacobians."""
