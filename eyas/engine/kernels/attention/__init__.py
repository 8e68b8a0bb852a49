"""Attention over the paged pool, of heads: plain rows, chains, trees and prompts; fast and exact."""
