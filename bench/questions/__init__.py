"""Spec-Bench (Xia et al., Findings of ACL 2024, arXiv 2401.07851): its questions, answered with and without drafting."""
